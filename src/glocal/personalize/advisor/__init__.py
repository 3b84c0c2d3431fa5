"""Advice: how much of a network to share, found out within a budget."""

from glocal.personalize.advisor.budget import Budget
from glocal.personalize.advisor.search import Advice, AdvisorConfig, advise

__all__ = ["Advice", "AdvisorConfig", "Budget", "advise"]
