"""Two processes on the CPU (gloo) train a model of `padding_free` as they train it padded."""

from tests.helpers.launching import finished, torchrun

SECONDS = 400  # of which most is importing, on a busy machine


def test_ddp_fsdp2_and_the_trainer_of_transformers():
    assert finished(torchrun(2, "-m", "tests.anywhere.distributed"), SECONDS).stdout.count("the same") == 2
