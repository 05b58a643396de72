"""One thread per test process: the tests run in parallel, and on small tensors more threads only wait for each other."""

import torch

torch.set_num_threads(1)
