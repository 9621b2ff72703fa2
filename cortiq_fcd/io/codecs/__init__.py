"""Tensor encodings of CMF, one file a family; `CODECS` is the table."""
