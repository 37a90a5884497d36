"""`python -m gpufeed.daemon` is `gpufeed`; loaders start their embedded daemon this way."""

import sys

from gpufeed.daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
