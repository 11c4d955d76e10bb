def run(module, observe, baseline):
    return []
