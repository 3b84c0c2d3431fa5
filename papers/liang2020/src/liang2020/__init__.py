"""The tables and figures of Liang et al. 2020, "Think Locally, Act Globally", as studies."""
