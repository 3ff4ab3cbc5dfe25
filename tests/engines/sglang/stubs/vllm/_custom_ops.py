def rotary_embedding(*args, **kwargs):
    raise NotImplementedError("vllm is a stand-in here")
