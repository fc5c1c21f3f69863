cpu: str
cuda: str
