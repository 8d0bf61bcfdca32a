-- The declaration in code that was applied last, so that none is applied twice.
ALTER TABLE queues ADD COLUMN declaration TEXT;
