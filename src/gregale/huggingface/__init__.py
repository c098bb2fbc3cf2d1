"""Models of the Hugging Face hub: their configurations, the names of their tensors, and their files.

`families` says which models there are, `config` turns a `config.json` into a `LlamaConfig` and back, `names` maps
tensors to parameters, `safetensors` reads and writes files by ranges, `folder` is a folder as the hub has it, and
`weights` moves tensors between such a folder and a mesh. Neither torch nor transformers is needed.
"""
