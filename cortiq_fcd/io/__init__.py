"""The CMF container, corpora and tokenizers; numpy only, no torch."""
