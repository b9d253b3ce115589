"""How fast we are, beside a peer that does the same work in the same run.

Machines are shared and noisy: only the ratio of two measurements that alternate means
anything.  Each benchmark checks what it did before it says how long that took.
"""
