"""Hand-written polish for O(1)-attention language models in CMF files."""
