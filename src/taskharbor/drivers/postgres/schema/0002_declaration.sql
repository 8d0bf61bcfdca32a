ALTER TABLE queues ADD COLUMN declaration text COLLATE "C";
