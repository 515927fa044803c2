"""What all tests rely on."""

import signal

# A shell that runs the tests in the background starts them with interrupts ignored, and so all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
