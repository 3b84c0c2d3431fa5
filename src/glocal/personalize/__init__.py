"""Personalisation: new clients, the advisor, mixtures of models, and pretext tasks."""
