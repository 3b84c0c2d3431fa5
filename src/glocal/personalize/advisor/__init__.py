"""The advisor: which part of a network to share, decided by short trainings within a budget."""

from glocal.personalize.advisor.budget import Budget
from glocal.personalize.advisor.search import Advice, AdvisorConfig, advise

__all__ = ["Advice", "AdvisorConfig", "Budget", "advise"]
