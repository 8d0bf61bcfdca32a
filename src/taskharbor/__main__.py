"""The command line as `python -m taskharbor`: for supervised child processes, and for systems without the installed script."""

from taskharbor.cli import main

if __name__ == "__main__":
    main()
