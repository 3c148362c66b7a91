"""The built-in decoder: a small, complete language model with Hugging Face Llama's names and files."""

from meshwright.models.decoder import (
    IGNORED_LABEL,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    generate,
    token_loss,
)
from meshwright.models.llama_files import load_llama, read_llama_config, save_llama

__all__ = [
    "IGNORED_LABEL",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "generate",
    "load_llama",
    "read_llama_config",
    "save_llama",
    "token_loss",
]
