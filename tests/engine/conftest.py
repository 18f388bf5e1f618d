"""One thread per test process: two threads of two processes on two cores spin at each other's barriers."""

import torch

torch.set_num_threads(1)
