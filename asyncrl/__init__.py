"""Fully asynchronous RL post-training. `asyncrl.buffer` and `asyncrl.kernels` need numpy alone."""
