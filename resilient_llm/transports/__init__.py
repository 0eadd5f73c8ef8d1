"""Adapters between HTTP libraries and the neutral messages; one module per library.

Nothing is decided in here.
"""
