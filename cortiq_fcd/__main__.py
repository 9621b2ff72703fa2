"""`python -m cortiq_fcd` is `cortiq-fcd`."""

from cortiq_fcd.cli import main

if __name__ == "__main__":
    main()
