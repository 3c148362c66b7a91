"""Same numbers: every strategy against one process, and one process against plain PyTorch."""
