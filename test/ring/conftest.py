"""The simulator's modules are plain files beside the tests; one thread is enough for tensors this small."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
