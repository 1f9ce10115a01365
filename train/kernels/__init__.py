"""Our Triton kernels, each beside its plain PyTorch reference; triton itself is imported when one is launched."""
