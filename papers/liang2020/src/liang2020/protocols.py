"""What the paper's protocols are, for the reports of its studies."""

PAPER = (
    "the paper’s text, with averages weighted by examples and the round selected on validation data"
)
RELEASED = (
    "as the authors’ released code where it differs from the text, "
    "but without its selection of rounds on test data: the last round counts"
)
TUNED = (
    "as `paper`, with several learning rates; a row shows the one that is best on validation data"
)
PROTOCOLS = {"paper": PAPER, "released": RELEASED, "tuned": TUNED}
