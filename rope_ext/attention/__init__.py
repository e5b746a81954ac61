"""How attention is computed with an encoding of its own, without a matrix of all pairs."""

from rope_ext.attention.choosing import Choice, choose
from rope_ext.attention.computing import attend
from rope_ext.attention.layout import Layout
from rope_ext.attention.registered import NAME, Kept

__all__ = ["NAME", "Choice", "Kept", "Layout", "attend", "choose"]
