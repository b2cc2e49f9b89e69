"""`python -m backend_kwargs`."""

from backend_kwargs.cli import main

if __name__ == "__main__":
    main()
