"""What the paper's protocols are, for the reports of its studies."""

PAPER = (
    "the paper’s text, done right: averages weighted by examples, "
    "the round chosen on validation data"
)
RELEASED = (
    "what the authors’ released code does where it differs from the text, "
    "but for its choice of rounds on test data: the last round counts"
)
TUNED = (
    "as `paper`, once for each of several learning rates; "
    "the one that is best on validation data stands for its row"
)
PROTOCOLS = {"paper": PAPER, "released": RELEASED, "tuned": TUNED}
