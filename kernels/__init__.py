"""Device operations of multilora: each op has a checked wrapper (`ops.py`), a torch reference and its kernels side by side."""

# `service.app` refuses to start when `import kernels` finds another distribution of the same name (Hugging Face has one).
MULTILORA_KERNELS = True
