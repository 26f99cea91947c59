"""What a test sees of passes."""


class Noted(list):
    """Values that a module notes in each pass, failed ones included.

    Plain lists of a module go back to the start of a step that is repeated; a list of a kind of its
    own does not.
    """
