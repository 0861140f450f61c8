"""The processes of a job: how they start, what they must agree on, how they end.

Reads nothing of layouts, models or files; hands on `agree` and `distributed`.
"""
