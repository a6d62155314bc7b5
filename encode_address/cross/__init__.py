"""Between two models: what a donor's block says, said to a host's (paper sections 3.11-3.14).

    alignment.py   tokens of two tokenizers that cover the same characters
    pairs.py       the same dictionaries in both models' own wrapper, and the words of fit and test
    transfer.py    output transplant through a map          replace.py   a block in place of another's

Two models never meet in one trace. The donor's job gives plain tensors, maps are fitted on tensors, and the host's job
takes tensors: so either model may be anywhere.
"""
