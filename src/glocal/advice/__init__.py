"""Advice: how much of a network to share, found out within a budget."""

from glocal.advice.budget import Budget
from glocal.advice.counsel import Advice, Counsel, advise

__all__ = ["Advice", "Budget", "Counsel", "advise"]
