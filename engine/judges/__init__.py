"""What finished pictures are worth: distances, and scores against what a prompt asked for.

A judge of pictures is pluggable; those that need a detector or a question-answering model take it
as a function, so that the arithmetic stands here and the model is the user's.
"""
