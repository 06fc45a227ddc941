"""Folders as Hugging Face has them: safetensors files, an index of their names, and beside them holdfast.json."""
