"""Provides models of the Hugging Face hub: their configurations, the names of their tensors, and their files.

`families` lists the supported models, `config` converts a `config.json` to a `LlamaConfig` and back, `tensor_names`
maps tensors to parameters, `safetensors` reads and writes byte ranges of files, `folder` opens a hub folder, `weights`
reads its tensors to a mesh, and `writing` writes them. It needs neither torch nor transformers.
"""
