"""The CUDA kernels on a GPU: launching, checking and timing them from Python, without Rust."""
