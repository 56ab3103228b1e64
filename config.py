"""pyinfra reads this first, whatever it is asked to do."""

from kit import run

run.guard()
