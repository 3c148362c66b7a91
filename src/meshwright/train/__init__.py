"""The ready-made trainer: job file, data, loop, launch. Nothing is imported here: a rank redirects its output first."""

__all__: list[str] = []
