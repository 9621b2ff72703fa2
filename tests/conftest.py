"""What every test can rely on."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background makes them ignore SIGINT, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
