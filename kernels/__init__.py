"""Device operations of multilora: each op has a checked wrapper (`ops.py`), a torch reference and its kernels."""

# `service.server.app` refuses to start when `import kernels` finds another package of that name (Hugging Face has one).
MULTILORA_KERNELS = True
