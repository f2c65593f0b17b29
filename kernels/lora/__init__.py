"""Products with the adapters' low-rank matrices."""

# Largest rank of the kernels for GPUs and NPUs; a CPU supports any rank. Here for those who must not import torch.
MAX_KERNEL_RANK = 256
