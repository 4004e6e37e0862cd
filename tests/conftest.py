"""One torch thread in every test, as in the engine."""

import torch

torch.set_num_threads(1)
