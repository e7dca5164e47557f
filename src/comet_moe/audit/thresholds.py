"""When a measurement becomes a finding: every threshold, by what it means."""

IDLE_GRADIENT = 1e-5
"""Gradient norm of a router over that of its experts, below which it is rounding.

A float32 sum over tokens is exact to about 1e-7; what a router learns from is 1e-2 to 10.
"""

DEAD_EXPECTED = 30
"""Choices that an expert of a balanced router would get, from which on none at all is no accident.

With independent choices an expert of fair load stays empty with probability exp(-30).
"""

EQUAL_SIMILARITY = 0.99
"""Mean cosine of two experts' outputs on the same tokens, above which they are the same function."""

PADDING_SHARE = 0.05
"""Share of the (token, expert) pairs that is padding, above which it costs time and distorts the loads."""

AUX_TOLERANCE = 0.05
"""Relative deviation of an auxiliary loss from its definition that a mean over other rows explains."""

AUX_GRADIENT = 1e-4
"""Gradient norm of an auxiliary loss over the task's, above which the difference of two passes is exact."""
