"""A library that starts a thread in C when it is imported; only the kernel sees it."""

import ctypes

_libc = ctypes.CDLL(None)
_thread = ctypes.c_ulong()
_pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
assert _libc.pthread_create(ctypes.byref(_thread), None, _pause, None) == 0
VALUE = 1
