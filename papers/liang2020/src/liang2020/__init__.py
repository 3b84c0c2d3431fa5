"""Every table and figure of Liang et al. 2020, "Think Locally, Act Globally", as studies of glocal."""
