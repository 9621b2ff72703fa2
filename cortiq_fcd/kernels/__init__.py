"""Pure forward and backward functions, one op a file.

Axes: B batch, T time, N = B*T rows (b-major), C hidden, H query heads, G kv heads, R = H/G query heads a kv head,
D head dim, F ffn, V vocab, L layers, M landmarks.
"""
