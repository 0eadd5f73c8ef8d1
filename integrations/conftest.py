"""Event loops for the async tests of these folders: those of the rest of the tests."""

from tests.conftest import anyio_backend, pytest_generate_tests

__all__ = ["anyio_backend", "pytest_generate_tests"]
