"""`python -m resilient_llm.cli`, for where the script is not on the path."""

from resilient_llm.cli import main

main()
