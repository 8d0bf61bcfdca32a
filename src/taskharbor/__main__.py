"""`python -m taskharbor` is the command line: for supervised children, and where no script is installed."""

from taskharbor.cli import main

if __name__ == "__main__":
    main()
