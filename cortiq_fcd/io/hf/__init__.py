"""HuggingFace directories in and out: config.json, sharded safetensors and tokenizer files to CMF and back.

    jsonfile.py      JSON that may be hostile, and keys that must all be understood
    safetensors.py   one weights file, strictly bounded; tensors are read piece by piece
    directory.py     a directory: its shards merged, its settings, its tokenizer
    rotary.py        the spellings of rope settings, and back
    families.py      which architectures there are: their defaults, and what their config.json says in CMF's words
    names.py         the tensors of a model in the order of execution, and where in the directory they lie
    quantization.py  which dtype a tensor gets
    encoding.py      large matrices, encoded block by block
    importing.py     a directory as the plan of a CMF file
    exporting.py     a CMF file as the plan of a directory
    writing.py       that plan, written

Nothing here imports torch.
"""
