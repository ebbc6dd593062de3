"""What the device is called."""

import torch

NAME = "pretend"
# PyTorch knows it by its own name once it is installed
DEVICE = torch.device("privateuseone", 0)
# The oldest PyTorch that it was tried with
LOWEST = "2.13"
