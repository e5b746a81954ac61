"""How a bias is added to attention without a matrix of all pairs: exact, in memory that grows with the length."""

from rope_ext.attention.choosing import Choice, choose
from rope_ext.attention.computing import attend
from rope_ext.attention.layout import Layout
from rope_ext.attention.registered import NAME

__all__ = ["NAME", "Choice", "Layout", "attend", "choose"]
