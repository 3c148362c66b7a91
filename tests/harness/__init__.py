"""Tools that tests share: ranks, cases, references, tolerances."""
